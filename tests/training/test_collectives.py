from deltajax.training.collectives import Collective, count_collectives

# Shapes, layouts and attributes as TPU and CPU compilers write them.
HLO = """HloModule jit_update, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%all-reduce-scatter.1 (p: bf16[64,8]) -> bf16[16,8] {
  %p = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[64,8]{1,0} all-reduce(%p), to_apply=%add
  ROOT %slice = bf16[16,8]{1,0} dynamic-slice(%all-reduce.9, %i)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(12)
  %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %constant.4), direction=LT
}

%visible (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%read (p: (s32[], s32[])) -> (s32[], s32[]) {
  %all-reduce.8 = (f32[4]{0:T(128)}, /*index=1*/f32[4]{0:T(128)}) all-reduce(\
%a, %b), replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add
}

%layer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-gather-start.1 = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%w)
  %all-gather-done.1 = bf16[16,8]{1,0} all-gather-done(%all-gather-start.1)
  %fusion.1 = bf16[16,8]{1,0} fusion(%g), kind=kCustom,\
 calls=%all-reduce-scatter.1
  %while.2 = (s32[], s32[]) while(%t), condition=%visible, body=%read
}

%known (p: (s32[])) -> (s32[]) {
  %permute = f32[3]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

ENTRY %main_spmd (p: f32[4]) -> f32[4] {
  %while.1 = (s32[], f32[4]) while(%t), condition=%condition, body=%layer
  %while.3 = (s32[]) while(%t), condition=%visible, body=%known,\
 backend_config={"known_trip_count":{"n":"5"}}
  ROOT %all-reduce.1 = f32[] all-reduce(%y), to_apply=%add, \
metadata={op_name="a all-gather( b"}
}
"""


def test_collectives_by_kind_times_trips():
  assert count_collectives(HLO) == [
    Collective("all-gather", 12, 12 * 16 * 8 * 2, 0),
    Collective("all-reduce", 13, 12 * 2 * 4 * 4 + 4, 12),
    Collective("collective-permute", 5, 5 * 3 * 4, 0),
    Collective("reduce-scatter", 12, 12 * 16 * 8 * 2, 0),
  ]


def test_no_collectives():
  hlo = "ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
  assert count_collectives(hlo) == []
