"""`symfuse demo`: all of symfuse on real models, with the data that they need."""
