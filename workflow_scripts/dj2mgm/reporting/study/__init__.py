"""The page of a study: variants, search, learning curve, and the agreement of cheap proxies."""
