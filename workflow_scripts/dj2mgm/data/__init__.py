"""File formats of the workflow: the only place that knows how a row of each looks."""
