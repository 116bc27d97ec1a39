"""The memory plan of a training stage: GPU and host memory by part, training plans that fit, the fastest of them."""
