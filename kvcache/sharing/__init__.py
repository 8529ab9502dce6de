"""Which node of several holds which block: an index, and the messages to and from it.

Engines without a cluster share their host memory through it. Nodes announce what they hold, engines
ask for the blocks of a prompt, and fetch them from the node that holds them. The index is a hint:
the node that fetches a block checks it, so a wrong answer costs time and never a wrong byte.

    node ──Holding──▶ IndexServer ◀──Question── engine
         ◀──Taken────  BlockIndex  ──Answer───▶
"""
