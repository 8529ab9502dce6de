"""Other projects' models on our blocks: one package each, which imports that project.

Lowest in the import order: nothing of the library imports them, so that nothing of it needs what
they need. `transformers/`: stock models generate on paged tensors.
"""
