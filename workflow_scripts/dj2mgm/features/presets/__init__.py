"""Training of text models by presets, and DeepSpeed configurations by number of GPUs."""
