"""The subjects of the step benchmark in PyTorch: `torch_models.NAME.make(size)`.

The architectures, sizes and batches are those of `subjects.NAME`, written as one writes
them in PyTorch: attention is `scaled_dot_product_attention`, an LSTM is `nn.LSTM`.
Images are in memory as in the Flax models, channels last.
"""
