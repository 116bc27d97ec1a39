"""Where rows come from: a file for each format. `read` takes a `Source` and yields pairs or conversations."""
