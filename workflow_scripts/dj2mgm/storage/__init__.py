"""Files on disk: whole or absent outputs, untrusted files, shards, streams, fingerprints."""
