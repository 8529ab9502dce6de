"""`kvcache dashboard`: one local page with the pool, the prefixes, the tiers and the traffic.

    cluster ──statistics, blocks, labels──▶ Observer ──one JSON text a second──▶ server ──▶ browser
    events  ──batches─────────────────▶

Reads only. Shows digests and lengths, no tokens and no salts.
"""
