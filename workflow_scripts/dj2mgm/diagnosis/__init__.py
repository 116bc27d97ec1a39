"""Why a stage failed (signatures of failures, found in its log), and whether this machine can run one (checks)."""
