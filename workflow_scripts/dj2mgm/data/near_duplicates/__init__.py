"""Search for near-duplicate images: signatures, codes and vectors within a distance, clusters."""
