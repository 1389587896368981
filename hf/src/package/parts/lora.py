def adapted(layer, passes, rank):
    """The layer; its attentions and dense networks have matrices of low rank for each pass of the loop around it."""
    for component in layer.children():
        for name in getattr(component, "matrices", ()):
            matrix = getattr(component, name, None)
            if matrix is not None and matrix.weight.dim() == 2:
                rows, columns = matrix.weight.shape
                matrix.lora_a = nn.Parameter(torch.zeros(passes, rank, columns))
                matrix.lora_b = nn.Parameter(torch.zeros(passes, rows, rank))
    return layer


def linear(x, matrix, at):
    """`W x`, and `B_p A_p x` in pass `p` where passes have matrices of their own."""
    y = F.linear(x, matrix.weight)
    if not hasattr(matrix, "lora_a"):
        return y
    return y + F.linear(F.linear(x, matrix.lora_a[at.turn]), matrix.lora_b[at.turn])
