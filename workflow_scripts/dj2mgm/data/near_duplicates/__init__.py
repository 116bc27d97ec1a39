"""Search for near-duplicate images: signatures, codes within a distance, clusters."""
