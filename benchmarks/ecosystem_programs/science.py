"""Programs with packages of the sciences: graphs, molecules, images, geometry."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ecosystem_programs import Computation, Training, program
from ecosystem_programs.parts import Array, dense, normals


def uniform(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape), jnp.float32)


def edges(nodes: int, number: int) -> tuple[Array, Array]:
    found = np.random.default_rng(0).integers(0, nodes, (2, number))
    return jnp.asarray(found[0]), jnp.asarray(found[1])


@program("jraph")
def jraph_network() -> Training:
    """A graph network with attention that regresses a number of each graph."""
    import jraph

    senders, receivers = edges(24, 96)
    graphs = jraph.GraphsTuple(
        nodes=normals(24, 8),
        edges=normals(96, 4),
        senders=senders // 6 + 6 * (jnp.arange(96) // 24),
        receivers=receivers // 6 + 6 * (jnp.arange(96) // 24),
        n_node=jnp.full(4, 6),
        n_edge=jnp.full(4, 24),
        globals=jnp.zeros((4, 8)),
    )
    params = {
        "edge": dense(4 + 8 + 8 + 8, 16, 1),
        "attention": dense(16 + 8 + 8 + 8, 1, 2),
        "node": dense(8 + 16 + 16 + 8, 16, 3),
        "global": dense(16 + 16 + 8, 1, 4),
    }

    def loss(params: Any, batch: Any) -> Array:
        graphs, wanted = batch

        def inputs(*parts: Array) -> Array:
            return jnp.concatenate(parts, -1)

        def edge(edges: Array, *others: Array) -> Array:
            return jax.nn.relu(inputs(edges, *others) @ params["edge"])

        def node(*parts: Array) -> Array:
            return jax.nn.relu(inputs(*parts) @ params["node"])

        def logits(*parts: Array) -> Array:
            return inputs(*parts) @ params["attention"]

        def attend(edges: Array, weights: Array) -> Array:
            return edges * weights

        def total(*parts: Array) -> Array:
            return inputs(*parts) @ params["global"]

        net = jraph.GraphNetwork(
            update_edge_fn=edge,
            update_node_fn=node,
            update_global_fn=total,
            attention_logit_fn=logits,
            attention_reduce_fn=attend,
        )
        return jnp.mean((net(graphs).globals[:, 0] - wanted) ** 2)

    return Training(loss, params, (graphs, normals(4, seed=7)))


@program("jraph")
def jraph_gcn() -> Training:
    """Two graph convolutions that classify the nodes of a graph."""
    import jraph

    senders, receivers = edges(40, 160)
    nodes = normals(40, 16)
    graph = jraph.GraphsTuple(
        nodes=nodes,
        edges=None,
        senders=senders,
        receivers=receivers,
        n_node=jnp.array([40]),
        n_edge=jnp.array([160]),
        globals=None,
    )

    def loss(params: Any, batch: Any) -> Array:
        graph, labels = batch
        for i, w in enumerate(params):

            def update(nodes: Array, w: Array = w, last: int = i) -> Array:
                return nodes @ w if last else jax.nn.relu(nodes @ w)

            convolve = jraph.GraphConvolution(update, add_self_edges=True)
            graph = convolve(graph)
        scores = jax.nn.log_softmax(graph.nodes)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    labels = jnp.argmax(nodes[:, :3], 1)
    return Training(loss, [dense(16, 32), dense(32, 3, 1)], (graph, labels))


@program("e3nn-jax")
def e3nn_message_passing() -> Training:
    """An equivariant network that learns the energy of points in space."""
    import e3nn_jax as e3nn
    from flax import linen as nn

    senders, receivers = edges(16, 64)

    class Layer(nn.Module):
        irreps: Any

        @nn.compact
        def __call__(self, nodes: Any, vectors: Any) -> Any:
            sphere = e3nn.spherical_harmonics([0, 1, 2], vectors, True)
            messages = e3nn.tensor_product(nodes[senders], sphere)
            length = jnp.linalg.norm(vectors.array, axis=1)
            radial = e3nn.bessel(length, 8, 4.0)
            weights = e3nn.flax.MultiLayerPerceptron(
                (16, messages.irreps.num_irreps), jax.nn.silu
            )(radial)
            messages = messages * weights
            nodes = e3nn.scatter_sum(messages, dst=receivers, output_size=16) / 4.0
            return e3nn.gate(e3nn.flax.Linear(self.irreps)(nodes))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, positions: Any) -> Any:
            offsets = positions[receivers] - positions[senders] + 1e-3
            vectors = e3nn.IrrepsArray("1o", offsets)
            nodes = e3nn.IrrepsArray("0e", jnp.ones((16, 1)))
            nodes = Layer(e3nn.Irreps("8x0e + 4x0e + 4x1o"))(nodes, vectors)
            nodes = Layer(e3nn.Irreps("8x0e + 4x0e + 4x1o"))(nodes, vectors)
            return e3nn.flax.Linear("0e")(nodes).array[:, 0].sum()

    network = Network()
    positions, energies = normals(4, 16, 3), normals(4, seed=1)
    params = network.init(jax.random.key(0), positions[0])

    def loss(params: Any, batch: Any) -> Array:
        positions, energies = batch
        found = jax.vmap(lambda p: network.apply(params, p))(positions)
        return jnp.mean((found - energies) ** 2)

    return Training(loss, params, (positions, energies), steps=20)


def lattice(side: int, spacing: float) -> Array:
    points = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)
    return jnp.asarray(spacing * points, jnp.float32) + 0.05 * normals(side**3, 3)


@program("jax-md")
def jax_md_forces() -> Computation:
    """The energy and the forces of a Lennard-Jones solid in a periodic box."""
    from jax_md import energy, quantity, space

    displacement, _ = space.periodic(3 * 1.2)
    potential = energy.lennard_jones_pair(displacement)

    def evaluate(positions: Array) -> Any:
        return potential(positions), quantity.force(potential)(positions)

    return Computation(evaluate, (lattice(3, 1.2),))


@program("jax-md")
def jax_md_dynamics() -> Computation:
    """Molecular dynamics at constant energy with soft spheres."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(3 * 0.9)
    potential = energy.soft_sphere_pair(displacement)
    start, step = simulate.nve(potential, shift, 1e-2)

    def run(positions: Array, key: Array) -> Any:
        state = start(key, positions, kT=0.1)
        state = jax.lax.fori_loop(0, 10, lambda _, state: step(state), state)
        return state.position, potential(state.position)

    return Computation(run, (lattice(3, 0.9), jax.random.key(0)))


@program("jax-md")
def jax_md_network() -> Training:
    """A Behler-Parrinello network's energies of atoms."""
    from flax import nnx
    from jax_md import energy, space

    displacement, _ = space.periodic(3 * 1.2)
    network = energy.behler_parrinello(
        displacement, key=jax.random.key(0), mlp_sizes=(16, 16)
    )
    graph, params = nnx.split(network.model)
    positions = jnp.stack([lattice(2, 1.2 + 0.05 * i) for i in range(4)])

    def loss(params: Any, batch: Any) -> Array:
        positions, energies = batch
        found = jax.vmap(nnx.merge(graph, params))(positions)
        return jnp.mean((found - energies) ** 2)

    return Training(loss, params, (positions, normals(4)), steps=60)


@program("ott-jax")
def ott_sinkhorn() -> Training:
    """Points moved onto others by the Sinkhorn divergence."""
    from ott.tools import sinkhorn_divergence

    def loss(params: Any, batch: Any) -> Array:
        found: Array = sinkhorn_divergence.sinkdiv(params, batch, epsilon=0.1)[0]
        return found

    return Training(loss, normals(32, 2), 0.5 * normals(32, 2, seed=1) + 2, 0.1, 20)


@program("dm-pix")
def pix_augment() -> Computation:
    """Flips, colour changes, a blur and an affine map of images."""
    import dm_pix as pix

    def augment(image: Array, key: Array) -> Array:
        flip, hue, contrast = jax.random.split(key, 3)
        image = pix.random_flip_left_right(flip, image)
        image = pix.random_hue(hue, image, 0.1)
        image = pix.random_contrast(contrast, image, 0.8, 1.2)
        image = pix.adjust_gamma(jnp.clip(image, 0, 1), 1.2)
        image = pix.gaussian_blur(image, 1.0, 5)
        return pix.rotate(image, 0.3, order=1)

    keys = jax.random.split(jax.random.key(0), 4)
    return Computation(jax.vmap(augment), (uniform(4, 16, 16, 3), keys))


@program("augmax")
def augmax_chain() -> Computation:
    """A chain of rotation, crop, colour jitter and normalization."""
    import augmax

    chain = augmax.Chain(
        augmax.HorizontalFlip(),
        augmax.Rotate(20),
        augmax.RandomSizedCrop(12, 12),
        augmax.ColorJitter(),
        augmax.Normalize(),
    )

    def augment(images: Array, keys: Array) -> Array:
        return jax.vmap(chain)(keys, images)

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    return Computation(augment, (uniform(4, 16, 16, 3), keys))


@program("jaxlie")
def jaxlie_poses() -> Training:
    """A rigid motion fitted to pairs of points."""
    import jaxlie

    wanted = jaxlie.SE3.exp(jnp.array([0.5, -0.3, 0.2, 0.4, 0.2, -0.6]))
    points = normals(32, 3)

    def loss(params: Any, batch: Any) -> Array:
        points, targets = batch
        pose = jaxlie.SE3.exp(params)
        return jnp.mean((jax.vmap(pose.apply)(points) - targets) ** 2)

    batch = points, jax.vmap(wanted.apply)(points)
    return Training(loss, jnp.full(6, 0.1), batch, 2e-2)


@program("jaxlie")
def jaxlie_graph() -> Training:
    """A pose graph of planar motions with a closed loop."""
    import jaxlie

    angle = np.pi / 4 * jnp.arange(8)
    corners = jnp.stack([jnp.cos(angle), jnp.sin(angle), 0 * angle], 1)
    moves = jnp.roll(corners, -1, 0) - corners
    measured = moves + 0.05 * normals(8, 3)

    def loss(params: Any, batch: Any) -> Array:
        def residual(first: Array, second: Array, step: Array) -> Array:
            between = jaxlie.SE2.exp(first).inverse() @ jaxlie.SE2.exp(second)
            return (jaxlie.SE2.exp(step).inverse() @ between).log()

        found = jax.vmap(residual)(params, jnp.roll(params, -1, 0), batch)
        return jnp.sum(found**2) + jnp.sum(params[0] ** 2)

    return Training(loss, 0.3 * normals(8, 3, seed=1), measured, 5e-2)


@program("jaxley")
def jaxley_neuron() -> Computation:
    """The voltage of a branched Hodgkin-Huxley neuron."""
    import jaxley as jx
    from jaxley.channels import HH

    branch = jx.Branch(jx.Compartment(), ncomp=2)
    cell = jx.Cell([branch] * 3, parents=[-1, 0, 0])
    cell.insert(HH())
    current = jx.step_current(
        i_delay=0.2, i_dur=1.0, i_amp=0.5, delta_t=0.025, t_max=3.0
    )
    cell.branch(0).loc(0.0).stimulate(current)
    cell.branch(2).loc(1.0).record()
    cell.make_trainable("HH_gNa", verbose=False)

    def voltage(params: Any) -> Array:
        found: Array = jx.integrate(cell, params=params)
        return found

    return Computation(voltage, (cell.get_parameters(),))


@program("cola-ml")
def cola_solve() -> Computation:
    """Conjugate gradients on a Kronecker product plus a diagonal."""
    import cola

    def solve(first: Array, second: Array, rhs: Array) -> Array:
        product = cola.ops.Kronecker(cola.ops.Dense(first), cola.ops.Dense(second))
        matrix = cola.PSD(product + cola.ops.I_like(product))
        found: Array = cola.inv(matrix, cola.CG(tol=1e-4, max_iters=50)) @ rhs
        return found

    first, second = normals(6, 6) / 3, normals(8, 8, seed=1) / 3
    matrices = first @ first.T, second @ second.T
    return Computation(solve, (*matrices, normals(48, seed=2)))
