"""The benchmark: time and memory of a step, against plain forward passes and the published algorithms.

Labels in tables and files: F and F2 are one and two forward passes of the stock model, N and N2 the same with only
the needed logits, J2 one pass over the batch twice. A method's name is this library's implementation; with the prefix
"published:" it is the algorithm as its authors wrote it. lora and lora-checkpointed are LoRA by backpropagation.
"""
