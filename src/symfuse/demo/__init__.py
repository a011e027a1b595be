"""`symfuse demo`: all of it on real models, with the data that it needs."""
