"""What the trained model says about held-out images, and how good that is."""
