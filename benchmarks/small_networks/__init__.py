"""Small networks of many kinds, by name, of which each is made by a function."""

from collections.abc import Callable

from small_networks import data, images, texts
from small_networks._network import Network as Network

NETWORKS: dict[str, Callable[[], Network]] = {
    make.__name__.replace("_", " "): make
    for make in (
        texts.masked_language_model,
        texts.encoder_decoder,
        texts.bidirectional_lstm,
        texts.linear_attention,
        texts.decoding,
        texts.two_towers,
        images.mixer,
        images.video,
        images.densenet,
        images.mobilenet,
        images.autoencoder,
        images.generator,
        images.diffusion_transformer,
        images.images_and_texts,
        data.messages,
        data.graph_attention,
        data.recommender,
        data.conformer,
        data.points,
        data.fourier_operator,
        data.differential_equation,
        data.causal_convolutions,
        data.meta_learning,
    )
}
