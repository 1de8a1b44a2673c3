"""The commands' work from end to end: transfer, distill, evaluate, and arithmetic on task vectors."""
