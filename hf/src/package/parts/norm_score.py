class NormScore(nn.Module):
    """A number of each token: `scale · ‖x‖ + offset`."""

    def __init__(self, passes=0):  #? pass_router
        super().__init__()  #? pass_router
        shape = [passes, 1] if passes else [1]  #? pass_router
        self.scale, self.offset = Matrix(*shape), Matrix(*shape)  #? pass_router
    def __init__(self):  #? !pass_router
        super().__init__()  #? !pass_router
        self.scale, self.offset = Matrix(1), Matrix(1)  #? !pass_router

    def forward(self, x, at):
        scale, offset = self.scale.weight.float(), self.offset.weight.float()
        if scale.dim() > 1:  #? pass_router
            scale, offset = scale[at.turn], offset[at.turn]  #? pass_router
        return scale * x.float().norm(dim=-1) + offset
