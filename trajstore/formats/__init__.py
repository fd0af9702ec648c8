"""Common file formats, without knowledge of runs.

``array_file`` is the base of every format: named arrays, read by rows. Each format has a
class that reads such a file and checks it completely before it reads a value: ``safetensors``,
``hdf5``, ``numpy_files``, ``torch_file``, and ``step_folder`` (with ``folder_numbers`` for numbers
that differ between files). ``open_file`` detects the format. ``safetensors`` and ``hdf5_writing``
also write tensors, which ``streamed_tensor`` describes. A new format needs one such module and an
entry in ``open_file``. `trajstore.exchange` interprets the arrays.
"""
