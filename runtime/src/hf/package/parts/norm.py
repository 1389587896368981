class Norm(nn.Module):
    """`x / rms(x)` times a gain, whose weight is stored less one."""  #? unit_offset
    """`x / rms(x)` times a gain."""  #? !unit_offset

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))  #? unit_offset
        self.weight = nn.Parameter(torch.ones(size))  #? !unit_offset

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return (y * (1.0 + self.weight.float())).to(x.dtype)  #? unit_offset
        return (y * self.weight.float()).to(x.dtype)  #? !unit_offset
