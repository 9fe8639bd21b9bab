"""Refuses flags of traces, profiles and dry runs that would do nothing: flag, value and way out."""

from megatron.config.flags import LogFlags, PipelineFlags


def check_log(log: LogFlags, pipeline: PipelineFlags) -> None:
    """Refuse what would record nothing, or record what nothing is done with.

    Raises:
        ValueError: naming the flag, its value and a way out.
    """
    _check_profile(log)
    _check_schedule_profile(log)
    if log.replan and pipeline.schedule_file is not None:
        raise ValueError(
            f"--replan would replace the plan of --schedule-file {pipeline.schedule_file}: leave "
            "one of them out"
        )
    if log.dry_run_gpu is not None and not log.dry_run:
        raise ValueError(f"--dry-run-gpu {log.dry_run_gpu} has no effect by itself: add --dry-run")


def _check_profile(log: LogFlags) -> None:
    if log.profile:
        if log.profile_step_end <= log.profile_step_start:
            raise ValueError(
                f"--profile-step-end {log.profile_step_end} is not after --profile-step-start "
                f"{log.profile_step_start}: nothing would be traced; raise it"
            )
        return
    for name in ("profile_step_start", "profile_step_end", "profile_dir"):
        value = getattr(log, name)
        if value != getattr(LogFlags, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {value} has no effect without --profile: add that")


def _check_schedule_profile(log: LogFlags) -> None:
    start, end = log.profile_schedule_start, log.profile_schedule_end
    if start is None:
        for flag, value in (
            ("--profile-schedule-end", end),
            ("--schedule-costs", log.schedule_costs),
            ("--replan", "" if log.replan else None),
        ):
            if value is not None:
                given = f"{flag} {value}".rstrip()
                raise ValueError(
                    f"{given} needs measured passes: add --profile-schedule-start ITERATION"
                )
        return
    if end is not None and end <= start:
        raise ValueError(
            f"--profile-schedule-end {end} is not after --profile-schedule-start {start}: nothing "
            "would be measured; raise it"
        )
    if log.schedule_costs is None and not log.replan:
        raise ValueError(
            f"--profile-schedule-start {start} measures passes, and nothing is done with it: add "
            "--schedule-costs FILE, --replan or both"
        )
