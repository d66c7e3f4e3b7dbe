"""`outrider bench`: configurations against plain decoding and other engines, on the same requests, in turns."""
