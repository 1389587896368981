class Statement(nn.Module):
    """A map from the stream to a stream, between layers."""

    def __init__(self, config, what, name=None, deviation=0.0, sources=()):  #? history
    def __init__(self, config, what, name=None, deviation=0.0):  #? !history
        super().__init__()
        h = config.hidden_size
        self.what, self.name, self.deviation = what, name, deviation
        if what == "norm":  #? norm_statement
            self.norm = Norm(h)  #? norm_statement
        if what == "linear":  #? linear_statement
            self.linear = Matrix(h, h)  #? linear_statement
        if what == "mix linear":  #? mix_linear
            self.mix = Matrix(h, 2 * h)  #? mix_linear
        if what == "mix history":  #? history
            self.sources, self.mix = sources, Matrix(len(sources) + 1)  #? history
        if what == "mix scaled":  #? mix_scaled
            self.mix = nn.ParameterDict({"lambda": torch.ones(1), "mu": torch.zeros(1)})  #? mix_scaled
        if what == "mix diagonal":  #? mix_diagonal
            self.mix = nn.ParameterDict({"weight": torch.eye(h), "delta": torch.zeros(h), "decay": torch.zeros(h)})  #? mix_diagonal

    def forward(self, x, at):
        if self.what == "norm":  #? norm_statement
            return self.norm(x)  #? norm_statement
        if self.what == "norm plain":  #? norm_plain
            y = x.float()  #? norm_plain
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)  #? norm_plain
        if self.what == "norm of":  #? norm_of
            return at.norms[self.name](x)  #? norm_of
        if self.what == "linear":  #? linear_statement
            return F.linear(x, self.linear.weight)  #? linear_statement
        if self.what == "start zeros":  #? start_zeros
            return torch.zeros_like(x)  #? start_zeros
        if self.what == "start normal":  #? noise
            drawn = (self.deviation * noise(at.positions, x.shape[-1])).to(x.dtype)  #? noise
            return drawn  #? noise&!lanes
            return drawn[..., None, :].expand_as(x)  #? noise&lanes
        if self.what == "save":  #? save
            at.saved[self.name] = x  #? save
            return x  #? save
        if self.what == "mix history":  #? history
            # Streams after these numbers of layers, and the one that is here.  #? history
            sources = [at.history[behind] for behind in self.sources] + [x]  #? history
            return sum(share * source for share, source in zip(self.mix.weight, sources))  #? history
        e = at.saved[self.name]  #? mix
        if self.what == "mix add":  #? mix_add
            return x + e  #? mix_add
        if self.what == "mix linear":  #? mix_linear
            return F.linear(torch.cat([x, e], -1), self.mix.weight)  #? mix_linear
        if self.what == "mix scaled":  #? mix_scaled
            return self.mix["lambda"] * x + self.mix["mu"] * e  #? mix_scaled
        if self.what == "mix diagonal":  #? mix_diagonal
            step = F.softplus(self.mix["delta"])  #? mix_diagonal
            return torch.exp(-step * self.mix["decay"].exp()) * x + step * F.linear(e, self.mix["weight"])  #? mix_diagonal
        raise ValueError(self.what)
