"""Both training stages: data, trainer, verified checkpoints, scores during training, and DeepSpeed's configuration."""
