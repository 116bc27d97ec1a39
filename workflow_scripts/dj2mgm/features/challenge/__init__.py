"""Challenge: answers to TextVQA, MMBench and other published benchmarks, and scores relative to a reference model."""
