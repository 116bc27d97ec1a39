"""Search for near-duplicates: signatures of images, codes and vectors within a distance, clusters."""
