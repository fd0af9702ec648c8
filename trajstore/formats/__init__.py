"""File formats of others, which know nothing of runs.

``safetensors`` and ``hdf5`` each have a class that reads a file, which is checked as a whole before
a value of it is read, and a function that writes one, of what ``streamed_tensor`` describes. A new
format is one such module; what its arrays mean for a run is said in `trajstore.exchange`.
"""
