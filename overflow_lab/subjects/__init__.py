"""What is scanned: a model, its inputs, and whether it is called or asked to generate."""

from overflow_lab.subjects.subject import Batch, Generation, Subject

__all__ = ["Batch", "Generation", "Subject"]
