"""Many trainings from one command, each a process of its own.

``grid`` says which runs a sweep has, and what each is called: the product of seeds and settings.
``sweep_folder`` says what is there of them, and how many threads they are trained with. The
``process_queue`` starts them, so many at once, and knows what became of each. Nothing here needs
torch, which the processes import for themselves.
"""
