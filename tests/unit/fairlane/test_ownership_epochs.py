"""What belongs to another assignment changes nothing in this one."""

from fairlane.offsets import CommitPoint
from fairlane.ownership import Membership, Ownership, PartitionId

PARTITION = PartitionId("requests.acme", 0)
MEMBER = Membership(3, "me", b"")


def test_a_record_fetched_before_the_assignment_makes_no_gap() -> None:
    ownership = Ownership()
    fetched_in_epoch = ownership.epoch
    ownership.assign({PARTITION: CommitPoint(100)}, MEMBER)

    # Read from another position, handed on late: taken as delivered, it would make 100 to 299 a gap.
    assert ownership.deliver(PARTITION, 300, fetched_in_epoch) is None

    claim = ownership.deliver(PARTITION, 100, ownership.epoch)
    assert claim is not None
    assert ownership.resume_points() == {PARTITION: 100}


def test_a_record_fetched_before_another_partition_came_still_counts() -> None:
    ownership = Ownership()
    ownership.assign({PARTITION: CommitPoint(100)}, MEMBER)
    fetched_in_epoch = ownership.epoch
    ownership.assign({PARTITION: CommitPoint(100), PartitionId("requests.globex", 0): None}, MEMBER)

    assert ownership.deliver(PARTITION, 100, fetched_in_epoch) is not None


def test_a_lookup_that_a_revocation_overtook_assigns_nothing() -> None:
    ownership = Ownership()
    before = ownership.revocations
    ownership.revoke_all()

    assert not ownership.assign({PARTITION: CommitPoint(10)}, MEMBER, unless_revoked_since=before)
    assert ownership.partitions() == ()
    assert ownership.assign({PARTITION: CommitPoint(21)}, MEMBER, unless_revoked_since=ownership.revocations)
    assert ownership.resume_points() == {PARTITION: 21}


def test_a_plan_that_outlived_its_assignment_settles_nothing() -> None:
    ownership = Ownership()
    ownership.assign({PARTITION: CommitPoint(10)}, MEMBER)
    claim = ownership.deliver(PARTITION, 10)
    assert claim is not None
    plan = ownership.plan([claim], 1_000)
    assert plan is not None
    ownership.revoke_all()
    ownership.assign({PARTITION: CommitPoint(10)}, MEMBER)

    ownership.settle(plan)

    assert ownership.resume_points() == {PARTITION: 10}
    assert ownership.deliver(PARTITION, 10) is not None
