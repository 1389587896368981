class Norm(nn.Module):
    """`x / rms(x)` times a gain, whose weight is stored less one."""  #? unit_offset
    """`x / rms(x)` times a gain."""  #? !unit_offset

    def __init__(self, size):  #? !latent_eps
    def __init__(self, size, eps=EPS):  #? latent_eps
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))  #? unit_offset
        self.weight = nn.Parameter(torch.ones(size))  #? !unit_offset
        self.eps = eps  #? latent_eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)  #? !latent_eps
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)  #? latent_eps
        return (y * (1.0 + self.weight.float())).to(x.dtype)  #? unit_offset
        return (y * self.weight.float()).to(x.dtype)  #? !unit_offset
