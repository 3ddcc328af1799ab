"""Idioms: what users write by hand, measured against float32.

`IDIOMS` holds them by kind and name. `python -m tests.dtypes.idioms` measures them;
`unsafe.txt` lists the ones that are known to be unsafe, `beyond_torch.txt` those that
are further off than in torch with `.float()`, by more than a rounding.
"""

from pathlib import Path

from ._idiom import Idiom as Idiom
from ._measure import Case as Case
from ._measure import cases as cases
from ._measure import under_autocast as under_autocast
from .distances import DISTANCES
from .losses import LOSSES
from .norms import NORMS
from .positions import POSITIONS
from .recurrences import RECURRENCES
from .statistics import STATISTICS
from .sums import SUMS

IDIOMS: dict[str, dict[str, Idiom]] = {
    "norms": NORMS,
    "losses": LOSSES,
    "distances": DISTANCES,
    "statistics": STATISTICS,
    "sums": SUMS,
    "positions": POSITIONS,
    "recurrences": RECURRENCES,
}
NAMED = {name: idiom for table in IDIOMS.values() for name, idiom in table.items()}

# One of each kind: the other ones are left to slow runs.
CORE = frozenset(
    """
    layer_norm_by_mean_and_var layer_norm_fast_variance layer_norm_by_sums
    layer_norm_equinox rms_norm_llama rms_norm_by_sum group_norm batch_norm_training
    batch_norm_fast_variance l2_normalise unit_vectors_by_rsqrt spectral_norm
    cosine_similarity standardise_columns global_response_norm
    cross_entropy_by_log_of_sum cross_entropy_of_probabilities gaussian_nll
    mean_squared_error mean_squared_error_of_two_products info_nce triplet
    forward_algorithm_by_logaddexp poisson_nll bce_with_logits
    bce_by_hand_of_sigmoid perplexity entropy_of_logits kl_of_a_vae elbo
    barlow_twins explained_variance squared_distances_direct
    squared_distances_by_expansion euclidean attention attention_causal
    attention_with_relative_bias attention_with_alibi variance_by_moments
    variance_of_squares variance_by_sums skewness correlation welford
    exponential_moving_average softmax softmax_with_temperature softmax_through_log
    logsumexp softmax_straight_through swish inverse_hyperbolic_sine messages_of_one
    segment_sum segment_variance scatter_add embedding_lookup mean_pool
    cumulative_sum prefix_sum cumulative_product_near_one transmittance
    loop_that_sums_from_its_first loop_that_sums_squares
    activation_times_each_of_a_loop sinusoids_vaswani
    sinusoids_of_arguments_by_einsum rotary_by_outer rotary_by_matmul alibi_by_key
    relative_bias_t5 decaying_state generalised_advantages euler_steps adam_step
    sinkhorn highway_of_many_residuals
    """.split()
)

UNSAFE = Path(__file__).parent / "unsafe.txt"
BEYOND_TORCH = Path(__file__).parent / "beyond_torch.txt"
