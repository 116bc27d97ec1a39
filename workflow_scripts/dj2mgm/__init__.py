"""MGM (Mini-Gemini) and the workflow around it: from data to a trained and evaluated model."""
