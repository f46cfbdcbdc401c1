"""What a run would take: its roles, memory, disk, time and price, and the prompt of the model. No torch.

`planning.make_plan` says all of it before anything happens; `plan` has its parts as data, and the site of a
job. `known` finds what this disk says, `roles` and `speeds` who runs on which device and how fast;
`rollouts` and `estimate` say how long. Nothing is fetched or written.
Not here: composing the run (run), the hardware and limits of a site (launch).
"""
