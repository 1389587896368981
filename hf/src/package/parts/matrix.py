class Matrix(nn.Module):
    """A weight of any shape."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))
