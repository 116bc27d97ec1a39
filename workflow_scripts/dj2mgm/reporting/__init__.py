"""Pages that show and compare results: reports, studies, decisions and the explorer."""
