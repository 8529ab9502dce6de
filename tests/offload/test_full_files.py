"""A full file tier makes room: its files may take as much as its slots."""

from __future__ import annotations

from pathlib import Path

from tests.interop.published_cluster import PublishedCluster


def test_small_blocks_fill_every_slot_and_no_write_is_refused(tmp_path: Path) -> None:
    # Blocks of 1 KiB, whose files are a quarter longer: see `files_bound`.
    with PublishedCluster(
        5, num_host_blocks=16, directory=str(tmp_path), num_disk_blocks=40
    ) as published:
        for _ in range(12):
            published.play(published.random_prompt())
            published.settle()
        offload = published.cluster.coordinator.statistics().offload
        assert offload is not None and offload.tiers.disk is not None
        assert offload.tiers.disk.num_evicted > 0
        assert (offload.tiers.num_failed_jobs, offload.last_failure) == (0, "")
