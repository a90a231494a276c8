"""`outrider serve`: a server with OpenAI's API, to try a drafter from an app."""
