"""Plan a run before it starts: roles, memory, disk, time, price, and the rendered prompt. No torch.

`planning.make_plan` makes a `plan.Plan`, for this machine or the site of a job. `known` reads what this disk
has of model and data, `roles` counts processes and their memory, `speeds` are those of the hardware;
`rollouts` and `estimate` compute the time. Nothing is fetched or written.
Not here: composing the run (run), the hardware and limits of a site (launch).
"""
