// What an alarm means and what to do, by its cause. Its own sentence has the number, the bound and the setting;
// docs/alarms.md lists the bounds, and a test keeps the two lists equal.

const LOST = "These rollouts could not be scored, so they count for nothing: neither as right nor as wrong. A few do no harm; if it is many, mend what failed, since those that are left may not be typical.";

const MEANINGS = {
  reply_collapse: "Different prompts get one and the same reply: the policy has found something that pays without reading the question. Read the rollouts, go back to the checkpoint before, mend the reward, lower the learning rate.",
  unearned_reward: "The reward rises through wrong replies while right ones get no more frequent: what is paid is not what is wanted. Read wrong replies with a high reward, and pay less for what they have in common.",
  entropy_fall: "The policy narrows down quickly and gets nothing for it. Lower the learning rate, or raise the temperature; a policy that says one thing only has nothing left to learn from.",
  entropy_collapse: "The policy is almost sure of every token, so the attempts of a group are alike and nothing more is learned. If accuracy is high the run may simply be done; otherwise go back to an earlier checkpoint.",
  length_collapse: "Replies have become far shorter and not better: being brief may pay more than being right. Read some, and look at what the reward gives for a short wrong reply.",
  length_explosion: "Replies have become far longer and not better: length may pay, or the policy no longer ends. Read some, and look at how length is normalised and whether the terminator is trained.",
  reward_collapse: "The reward has fallen far below its best and stayed there. Go on from the checkpoint before the fall, with a lower learning rate; if it falls again, look at what was new in the data then.",
  reward_eval_divergence: "The training reward rose while held-out accuracy fell, by more than chance: the policy learns the training prompts, or the verifier's weak places. Read recent rollouts with full marks.",
  duplicate_completions: "The attempts of a group repeat each other, so there is nothing to compare. Look at temperature and entropy, and whether the engine's seeds differ.",
  runaway: "Replies answer, and then pose themselves another question. The verifier may read the wrong answer, and training pays for the rest. Add what begins the next question to the task's stops.",
  format_drift: "Answers stay right but leave the form that the task asks for. It costs nothing now, and everything with another verifier. Let the reward depend on the form.",
  truncation: "Replies are cut at their limit before they have answered, and are judged as they stand. Give them more room, or shape the reward by length.",
  zero_variance: "In almost all groups every attempt earned the same, so they teach nothing. The task is too easy or too hard for the policy now: mix its difficulty, filter such groups, or stop here if it is solved.",
  ceiling: "The verifier gave more than full marks. Such a rollout has no score and is not trained on. Mend the verifier, or say in task.max_reward what full marks are.",
  impossible_value: "A number cannot be what it is: a share above one, a negative duration, a reward below the lowest marks. Something that measures is broken. Do not trust this step's numbers until it is found.",
  verifier_errors: LOST,
  logprob_drift: "Engine and learner disagree about the probability of the same tokens: they do not compute the same model. Usual causes: weights that were not taken over, another number format, another temperature.",
  prefix_break: "A later turn could not go on from the ids before it, because the chat template renders the conversation otherwise the second time. Tokens are then counted as a new sample; use a template that keeps what was said.",
  fate_leak: "An attempt ended in no way, or in two. The batch is not what its prompts say. This is a fault of strop or of a part that was put into it: please report it with the run's log.",
  invalid_eval: "An evaluation is no result: too many replies were cut or could not be judged. No change is worked out from it. Evaluate the checkpoint anew once the cause is mended.",
  grad_norm: "One gradient was many times as large as usual. Clipping has bounded the step; if it comes again, look at that step's rollouts, and lower the learning rate.",
  vanishing_updates: "Updates are smaller than the last digit of the weights, so nothing moves. Raise the learning rate, and keep masters in float32.",
  no_gradient: "There is something to learn from, and the loss does not move for it. Look at the clip bounds and at the algorithm's own loss.",
  term_dominates: "One term of the loss is so large that the other hardly counts. Weigh them anew (sft.weight).",
  non_finite: "An update was not a number and was refused; the weights are as they were. If it comes again, look at the step's log-probabilities and at the number format.",
  empty_step: "Nothing was left to train on in this step, and the weights are as they were.",
  short_batch: "Fewer groups than asked for were left after those without signal were replaced. The step is noisier than others; make the task less uniform, or ask for smaller batches.",
  selection_bias: "Long replies keep coming too late to be trained on, so the policy learns to be brief. Raise train.max_staleness, or sample less far ahead.",
  slower_than_plan: "A stage takes far longer than planned. Look whether something else uses this machine, and at the timeline for what waits for what.",
  memory_growth: "Memory grows step after step and will run out. A verifier or an environment that keeps what it has seen is the usual cause.",
  disk_low: "The disk fills up; the run ends with a checkpoint before it is full. Make room, then resume.",
  loop_lag: "The event loop was kept busy, so that everything else waited: mostly a verifier or an environment that computes in this process. Let it judge in a worker, or make it asynchronous.",
  stall: "Nothing has moved for long. The log says which stage waits; an engine or a sandbox that does not answer is the usual cause.",
  weight_canary: "A replica does not compute with the weights that were published, and gets no requests until it does. What it sampled meanwhile counts as lost.",
};

export const explain = (alarm) => (alarm.kind === "rollout_lost" ? LOST : MEANINGS[alarm.cause]);
