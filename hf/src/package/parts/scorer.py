class Network(nn.Module):
    """A small network that scores tokens."""

    def __init__(self, size, hidden, passes=0):  #? pass_router
        super().__init__()  #? pass_router
        each = [passes][: passes > 0]  #? pass_router
        self.up, self.down = Matrix(*each, size, hidden), Matrix(*each, size)  #? pass_router
    def __init__(self, size, hidden):  #? !pass_router
        super().__init__()  #? !pass_router
        self.up, self.down = Matrix(size, hidden), Matrix(size)  #? !pass_router

    def forward(self, x, at):
        up, down = self.up.weight.float(), self.down.weight.float()
        if up.dim() > 2:  #? pass_router
            up, down = up[at.turn], down[at.turn]  #? pass_router
        return (F.gelu(F.linear(x.float(), up)) * down).sum(-1)
