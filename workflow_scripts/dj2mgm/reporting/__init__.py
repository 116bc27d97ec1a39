"""The comparison page: experiments side by side, in one HTML file that needs nothing else."""
