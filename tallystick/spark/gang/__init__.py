"""Resident tasks: one long Spark job whose tasks take epochs from the driver.

    driver ══ order ══► member 0..n-1      one connection each; its end is the member's end
    member ══ frames ══► member            one connection for each direction

An order holds the same plans that a Spark job's tasks get; what Spark's shuffle does there is done
by `gang.inbox`: frames of a stage by target, in order of (source, sequence).

Invariants:
    * An order goes once, over one connection, to one process: it has no second attempt. If a member
      is lost the driver gives the whole gang up; the epoch is aborted, and runs in a new one.
    * A member that loses the driver ends at once, in the middle of any work.
    * Nothing is unpickled from a peer that has not proved that it knows the gang's secret.
"""
