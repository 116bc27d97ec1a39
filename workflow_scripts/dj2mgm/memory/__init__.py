"""What a training stage will need: GPU and host memory part by part, which arrangements fit, the fastest of them."""
