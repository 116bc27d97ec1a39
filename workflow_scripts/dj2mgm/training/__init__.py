"""Both training stages: the data they read, the trainer, checkpoints that can be trusted, DeepSpeed's configuration."""
