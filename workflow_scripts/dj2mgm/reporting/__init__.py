"""Pages that show and compare results: reports, their verdicts, and pages of variants."""
