"""Both training stages: data, trainer, checkpoints, scores during training."""
