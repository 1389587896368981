"""Configuration of the model in this folder."""

from transformers import PretrainedConfig


class DreamcConfig(PretrainedConfig):
    """Sizes of the model.

    `components` has the numbers of each part that layers are composed of, under the part's name.
    `recur` is how often the recurrent layers are applied; another number runs the model at another depth.  #? recur
    `exit` is a share of a token, below 1: a token leaves its loop where more than that of it has; absent, it runs all passes.  #? leaving
    `lanes` is how many lanes the stream has.  #? lanes
    `num_hidden_layers` counts what a cache has a place for: attentions over the sequence, as often as they are applied.
    """

    model_type = "dreamc"

    def __init__(
        self,
        vocab_size=0,
        hidden_size=0,
        max_position_embeddings=0,
        components=None,
        recur=1,  #? recur
        lanes=1,  #? lanes
        exit=None,  #? leaving
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.components = components or {}
        self.recur = recur  #? recur
        self.lanes = lanes  #? lanes
        self.exit = exit  #? leaving
        super().__init__(**kwargs)
