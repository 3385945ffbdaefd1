"""`paceline bench`: plain decoding, speculation and other programs, measured in turns on the same prompts."""
