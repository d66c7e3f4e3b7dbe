"""Spectral clustering of few items by a matrix of their affinities."""

import numpy as np
from jaxtyping import Float, Int

ROUNDS = 100
"""Most rounds of k-means."""


def spectral_clusters(affinity: Float[np.ndarray, "items items"], count: int, first: int = 0) -> list[list[int]]:
    r"""Part items into `count` clusters, none of them empty, such that items of high affinity stand together.

    With $D$ the sums of the rows of the affinity $A$, the eigenvectors of the `count` smallest eigenvalues of the
    normalised Laplacian $I - D^{-1/2} A D^{-1/2}$ give each item a point. The points, scaled to length one, are parted
    by k-means. Its start is chosen without chance: the item `first`, then always the item that is farthest from those
    chosen before.

    Args:
        affinity: Symmetric, not negative, its diagonal above 0.
        count: Number of clusters, from 1 to the number of items.
        first: The item at which k-means begins.

    Returns:
        The items of each cluster in order; the clusters in the order of their first items.

    Example:
        >>> spectral_clusters(np.array([[1, 0, 0.9], [0, 1, 0], [0.9, 0, 1]]), count=2)
        [[0, 2], [1]]

    References:
        Ng, Jordan and Weiss 2001, "On Spectral Clustering: Analysis and an algorithm".
    """
    scale = 1 / np.sqrt(affinity.sum(1))
    laplacian = np.eye(len(affinity)) - scale[:, None] * affinity * scale[None, :]
    _, vectors = np.linalg.eigh(laplacian)
    points = vectors[:, :count]
    points = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-12)
    labels = _k_means(points, count, first)
    clusters = [np.flatnonzero(labels == label).tolist() for label in range(count)]
    return sorted(clusters, key=min)


def _k_means(points: Float[np.ndarray, "items dim"], count: int, first: int) -> Int[np.ndarray, " items"]:
    chosen = [first]
    while len(chosen) < count:
        gaps = _distances(points, points[chosen]).min(1)
        gaps[chosen] = -1
        chosen.append(int(gaps.argmax()))
    labels = _distances(points, points[chosen]).argmin(1)
    # Equal points would leave a centre without any: each centre keeps its own.
    labels[chosen] = range(count)
    for _ in range(ROUNDS):
        centres = np.stack([points[labels == label].mean(0) for label in range(count)])
        distances = _distances(points, centres)
        moved = distances.argmin(1)
        for label in range(count):
            if not (moved == label).any():
                many = np.bincount(moved, minlength=count)[moved] > 1
                distances_moved = np.where(many, distances[np.arange(len(points)), moved], -1)
                moved[int(distances_moved.argmax())] = label
        if (moved == labels).all():
            break
        labels = moved
    return labels


def _distances(
    points: Float[np.ndarray, "items dim"], centres: Float[np.ndarray, "clusters dim"]
) -> Float[np.ndarray, "items clusters"]:
    return ((points[:, None] - centres[None]) ** 2).sum(-1)
