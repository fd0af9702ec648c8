"""Many training runs from one command, each in its own process.

``grid`` computes the runs of a sweep and their names: the product of seeds and settings.
``sweep_folder`` reads which runs are complete, and stores the number of threads. ``process_queue``
runs a limited number of processes at once and records their results. These modules do not need
torch; the processes import it.
"""
