class ProjectionMixture(nn.Module):
    """A matrix of each expert; a token uses one, times its score; and one that all tokens share."""  #? shared
    """A matrix of each expert; a token uses one, times its score."""  #? !shared

    def __init__(self, experts, rows, columns, shared):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, rows, columns))
        self.shared = Matrix(rows, columns) if shared else None  #? shared
        self.register_parameter("bias", None)  #? bias

    def forward(self, x, choice, at):  #? lora
    def forward(self, x, choice):  #? !lora
        (chosen, gates), flat = choice, x.flatten(0, 1)
        chosen = chosen.flatten()
        y = flat.new_zeros(flat.shape[0], self.weight.shape[1])
        for e in chosen.unique().tolist():
            rows = (chosen == e).nonzero()[:, 0]
            weight = self.weight[e]
            if self.shared is not None:  #? shared
                weight = weight + self.shared.weight  #? shared
            y[rows] = F.linear(flat[rows], weight)
        y = y.view(*x.shape[:2], -1) * gates  #? bias
        return y if self.bias is None else y + self.bias  #? bias
        return y.view(*x.shape[:2], -1) * gates  #? !bias
